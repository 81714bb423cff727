"""What people and programs see: tables, JSON and files, progress. Takes plain values, knows no engine and no metric."""
