"""What runs request graphs, behind one protocol; each is imported on demand by `connect`."""
