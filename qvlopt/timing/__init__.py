"""What bench measures: stages, workloads, statistics, comparisons and the machine, with clocks and seeds as arguments."""
