"""Plain values that every layer speaks: facts, manifest, report, errors. No I/O happens here."""
