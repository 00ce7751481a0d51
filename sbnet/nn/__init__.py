"""Modules that own parameters and call sbnet's ops."""
