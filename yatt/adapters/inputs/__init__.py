"""What users give: rows, models, tokenizers, Python files."""
