"""Line files and logs, and the processes that append to them."""
