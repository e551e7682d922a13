//! End-to-end tests and the benchmark harness.
