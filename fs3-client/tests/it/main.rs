//! Backends and stores against a real S3 server and a real registry, and through a proxy that breaks things.

mod answers;
mod backends;
mod leases;
mod mount;
mod registry;
mod s3_faults;
mod stores;
mod support;
