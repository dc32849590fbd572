//! Placeholder until the mount code lands.
