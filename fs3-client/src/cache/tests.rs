//! The cache against a plain model: the blobs themselves. A byte is right or an error.

mod backend;
mod basics;
mod cases;
mod model;
mod schedules;
mod support;
