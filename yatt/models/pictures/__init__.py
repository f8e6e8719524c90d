"""Models that take pictures: their tower, and how they write pictures into prompts."""
