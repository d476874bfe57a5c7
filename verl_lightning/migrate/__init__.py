"""Translates verl's configurations to this package's, and tells of every key what became of it."""
