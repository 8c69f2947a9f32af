"""What the command line can be told to do, one command a file."""
