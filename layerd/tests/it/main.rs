//! `layerd` against the kernel. Everything that mounts needs root and is named `privileged_…`.

mod converted;
mod guest;
mod killed;
mod many;
mod names;
mod readonly;
mod refused;
mod stacked;
mod support;
mod unmounting;
mod writable;
