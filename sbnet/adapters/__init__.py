"""sbnet beside what others use: supervision, SAHI, torchvision's transforms. Each module imports its package."""
