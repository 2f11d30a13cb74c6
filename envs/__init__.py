"""Gymnasium environments over replayed traces."""
