"""One file a metric: a function of an answer and the right answers of one item."""
