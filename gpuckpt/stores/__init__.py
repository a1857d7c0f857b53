"""Where images live. Today: a directory of this host."""
