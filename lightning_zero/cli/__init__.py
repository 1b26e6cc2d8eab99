"""The program ``lightning-zero``: one file for each subcommand."""
