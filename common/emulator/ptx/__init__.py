"""PTX text to records: lexer, parser, module, control flow."""
