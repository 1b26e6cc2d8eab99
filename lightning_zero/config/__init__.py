"""The user's words in, a whole DeepSpeed config out: pure, without torch, Lightning or DeepSpeed."""
