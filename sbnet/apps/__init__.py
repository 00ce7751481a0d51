"""Programs: the command line and the video job."""
