"""The compressed, bit-exact parameter gather."""
