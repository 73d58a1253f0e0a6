"""Line files and logs with rotation."""
