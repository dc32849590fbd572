//! A scientific Python stack, as `pip install` lays it down: shared libraries and thousands of modules.

use super::pack;
use crate::tool;
use anyhow::Result;
use std::path::Path;

/// Everything by version, dependencies included, so that the layer does not change when one of them does.
const PACKAGES: [&str; 20] = [
    "contourpy==1.3.3",
    "cycler==0.12.1",
    "fonttools==4.68.0",
    "joblib==1.6.0",
    "kiwisolver==1.5.1",
    "matplotlib==3.11.2",
    "mpmath==1.3.0",
    "numpy==2.4.6",
    "packaging==26.4",
    "pandas==3.1.1",
    "patsy==1.0.3",
    "pillow==13.0.0",
    "pyparsing==3.3.3",
    "python-dateutil==4.0.0",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "statsmodels==0.15.0",
    "sympy==1.14.0",
    "threadpoolctl==3.8.0",
    "tzdata==2026.6",
];

pub(super) fn build(work: &Path, out: &Path) -> Result<()> {
    install(&PACKAGES, work, out)
}

/// Installs wheels for one named platform, whatever Python runs pip.
pub(super) fn install(packages: &[&str], work: &Path, out: &Path) -> Result<()> {
    tool::require("python3", "python3-pip")?;
    let root = work.join("root");
    let mut pip = pack::quiet("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]);
    pip.args(["--disable-pip-version-check", "--root-user-action=ignore"]);
    pip.args(["--implementation=cp", "--python-version=3.11"]);
    for glibc in ["manylinux2014", "manylinux_2_27", "manylinux_2_28"] {
        pip.arg(format!("--platform={glibc}_x86_64"));
    }
    pip.arg("--target").arg(root.join("usr/local/lib/python3.11/site-packages")).args(packages);
    pack::run(&mut pip)?;
    pack::tree(&root, "usr", out)
}
