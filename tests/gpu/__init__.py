"""The main job on one CUDA device."""
