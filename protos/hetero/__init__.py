"""Packages named as in the .proto files."""
