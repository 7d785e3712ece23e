"""Side by side with peers: what Holdfast costs, as ratios within one interleaved run."""
