"""The ranks of one node: state kept by their agent, exits and kills."""
