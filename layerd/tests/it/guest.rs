//! The program on a stock kernel, in the guest of the tier `vm`.

use crate::converted;
use fixtures::require;

#[test]
fn vm_three_converted_layers() {
    require::vm();
    converted::check_three_layers();
}

#[test]
fn vm_three_converted_layers_writable() {
    require::vm();
    converted::check_three_layers_writable();
}

#[test]
fn vm_three_compressed_layers() {
    require::vm();
    converted::check_three_compressed_layers();
}
