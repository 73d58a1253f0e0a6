"""Where ranks stand, and what follows: who hangs, who is slow, who is to blame. Pure but for the sampling."""
