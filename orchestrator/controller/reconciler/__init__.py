"""One pass over all live runs: whose they are, what was asked, what is done."""
