"""`yatt judge`: how good a GenRM is, and a second opinion."""
