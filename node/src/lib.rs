//! thawd and the thaw command line.
