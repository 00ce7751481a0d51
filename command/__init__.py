"""The command line `sbnet`: its options and their help. What commands do is `sbnet.apps`."""
