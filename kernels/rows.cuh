// What products of few rows (`rows.cu`, `rows_in_clusters.cu`) share.

// The sum of squares of two numbers.
DEVICE float square(unsigned x) {
  const float low = to_float((bfloat16)(x & 0xffff)), high = to_float((bfloat16)(x >> 16));
  return low * low + high * high;
}
