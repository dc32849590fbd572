//! Backends and stores against a real S3 server, and through a proxy that breaks things.

mod backends;
mod leases;
mod s3_faults;
mod stores;
mod support;
