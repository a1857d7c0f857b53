"""The manual: written texts (*.man here) joined with what the parser, the errors and the checks say.

`python -m gpuckpt.cli.manual DIR` writes DIR/man and DIR/completions; the committed files are the same.
"""
