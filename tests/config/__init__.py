"""The config package: the user's words in, a whole config out."""
