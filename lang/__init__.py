"""The language: what a program writes, and the request graph it becomes."""
