//! A store that is a directory.
