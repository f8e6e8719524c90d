"""The prompt groups of one controller: sampling, scoring, routing to engines, validation."""
