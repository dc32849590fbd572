//! The dependencies of a web application: tens of thousands of small files, deep and with long names.

use super::pack;
use crate::tool;
use anyhow::Result;
use std::fs;
use std::path::Path;

const PACKAGES: [&str; 16] = [
    "@babel/core@7.28.5",
    "@babel/preset-env@7.28.5",
    "core-js@3.46.0",
    "date-fns@4.1.0",
    "eslint@9.39.1",
    "express@5.1.0",
    "jest@30.2.0",
    "lodash@4.17.21",
    "next@14.2.33",
    "prettier@3.6.2",
    "react@18.3.1",
    "react-dom@18.3.1",
    "rxjs@7.8.2",
    "typescript@5.9.3",
    "vite@7.2.2",
    "webpack@5.104.1",
];

pub(super) fn build(work: &Path, out: &Path) -> Result<()> {
    install(&PACKAGES, work, out)
}

/// Installs packages with what they depend on as of one day, without running their scripts.
pub(super) fn install(packages: &[&str], work: &Path, out: &Path) -> Result<()> {
    tool::require("npm", "npm")?;
    let app = work.join("root/app");
    fs::create_dir_all(&app)?;
    fs::write(app.join("package.json"), r#"{"name":"app","version":"1.0.0","private":true}"#)?;
    let mut npm = pack::quiet("npm");
    npm.args(["install", "--loglevel=error", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]);
    npm.args(["--before=2026-11-01", "--os=linux", "--cpu=x64", "--libc=glibc"]).args(packages).current_dir(&app);
    pack::run(&mut npm)?;
    // It names the registry that the packages came from, which differs from place to place.
    fs::remove_file(app.join("node_modules/.package-lock.json"))?;
    pack::tree(&work.join("root"), "app", out)
}
