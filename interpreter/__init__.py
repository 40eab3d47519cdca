"""Runs programs: records what they write as request graphs and hands these to a backend."""
