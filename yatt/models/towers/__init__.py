"""Towers of models that take pictures: their kinds, and the tables of their weights."""
