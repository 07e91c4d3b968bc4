"""The command line: one file per command, each turning options into one call and an exit code."""
