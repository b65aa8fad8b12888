"""The decoder's forward as one C function, for a CPU whose time goes into reading weights."""
