"""The algorithms to choose from, one method a file: its formula, its options and its documentation together."""
