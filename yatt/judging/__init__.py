"""How completions are judged: what is asked of a GenRM, and what its answers mean. Pure."""
