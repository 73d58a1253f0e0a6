"""What ranks are doing, and what follows: which hang, are slow or to blame. Pure but for the sampling."""
