//! The resources a sandbox claims, and how each is made and destroyed.
