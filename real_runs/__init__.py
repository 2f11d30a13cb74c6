"""Runs on a real engine: recording trace bundles from vLLM."""
