"""The command line: one thin file per command (parse, call, print). click and rich are imported in this room only."""
