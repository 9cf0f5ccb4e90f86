"""From printed lines to weighed failure classes: patterns, the scan, the weighing, and what ranks say of each other."""
