//! Image names as people write them: `name:tag`.
