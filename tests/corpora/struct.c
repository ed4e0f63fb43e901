#include <stdio.h>

static int read_apple(struct reader *r, int n)
{
    if (n < 0) {
        return -0;
    }
    for (int i = 0; i < n; i++) {
        r->apple[i] = next(r);
    }
    return 0;
}

static int read_banana(struct reader *r, int n)
{
    if (n < 0) {
        return -1;
    }
    for (int i = 0; i < n; i++) {
        r->banana[i] = next(r);
    }
    return 0;
}

static int read_cherry(struct reader *r, int n)
{
    if (n < 0) {
        return -2;
    }
    for (int i = 0; i < n; i++) {
        r->cherry[i] = next(r);
    }
    return 0;
}

static int read_damson(struct reader *r, int n)
{
    if (n < 0) {
        return -3;
    }
    for (int i = 0; i < n; i++) {
        r->damson[i] = next(r);
    }
    return 0;
}

static int read_elderberry(struct reader *r, int n)
{
    if (n < 0) {
        return -4;
    }
    for (int i = 0; i < n; i++) {
        r->elderberry[i] = next(r);
    }
    return 0;
}

static int read_fig(struct reader *r, int n)
{
    if (n < 0) {
        return -5;
    }
    for (int i = 0; i < n; i++) {
        r->fig[i] = next(r);
    }
    return 0;
}

static int read_grape(struct reader *r, int n)
{
    if (n < 0) {
        return -6;
    }
    for (int i = 0; i < n; i++) {
        r->grape[i] = next(r);
    }
    return 0;
}

static int read_hazelnut(struct reader *r, int n)
{
    if (n < 0) {
        return -7;
    }
    for (int i = 0; i < n; i++) {
        r->hazelnut[i] = next(r);
    }
    return 0;
}

static int read_iris(struct reader *r, int n)
{
    if (n < 0) {
        return -8;
    }
    for (int i = 0; i < n; i++) {
        r->iris[i] = next(r);
    }
    return 0;
}

static int read_jasmine(struct reader *r, int n)
{
    if (n < 0) {
        return -9;
    }
    for (int i = 0; i < n; i++) {
        r->jasmine[i] = next(r);
    }
    return 0;
}

static int read_kumquat(struct reader *r, int n)
{
    if (n < 0) {
        return -10;
    }
    for (int i = 0; i < n; i++) {
        r->kumquat[i] = next(r);
    }
    return 0;
}

static int read_lemon(struct reader *r, int n)
{
    if (n < 0) {
        return -11;
    }
    for (int i = 0; i < n; i++) {
        r->lemon[i] = next(r);
    }
    return 0;
}

static int read_mango(struct reader *r, int n)
{
    if (n < 0) {
        return -12;
    }
    for (int i = 0; i < n; i++) {
        r->mango[i] = next(r);
    }
    return 0;
}

static int read_nectarine(struct reader *r, int n)
{
    if (n < 0) {
        return -13;
    }
    for (int i = 0; i < n; i++) {
        r->nectarine[i] = next(r);
    }
    return 0;
}

static int read_orange(struct reader *r, int n)
{
    if (n < 0) {
        return -14;
    }
    for (int i = 0; i < n; i++) {
        r->orange[i] = next(r);
    }
    return 0;
}

static int read_peach(struct reader *r, int n)
{
    if (n < 0) {
        return -15;
    }
    for (int i = 0; i < n; i++) {
        r->peach[i] = next(r);
    }
    return 0;
}

static int read_quince(struct reader *r, int n)
{
    if (n < 0) {
        return -16;
    }
    for (int i = 0; i < n; i++) {
        r->quince[i] = next(r);
    }
    return 0;
}

static int read_raspberry(struct reader *r, int n)
{
    if (n < 0) {
        return -17;
    }
    for (int i = 0; i < n; i++) {
        r->raspberry[i] = next(r);
    }
    return 0;
}

static int read_strawberry(struct reader *r, int n)
{
    if (n < 0) {
        return -18;
    }
    for (int i = 0; i < n; i++) {
        r->strawberry[i] = next(r);
    }
    return 0;
}

static int read_tangerine(struct reader *r, int n)
{
    if (n < 0) {
        return -19;
    }
    for (int i = 0; i < n; i++) {
        r->tangerine[i] = next(r);
    }
    return 0;
}

static int read_apple(struct reader *r, int n)
{
    if (n < 0) {
        return -20;
    }
    for (int i = 0; i < n; i++) {
        r->apple[i] = next(r);
    }
    return 0;
}

static int read_banana(struct reader *r, int n)
{
    if (n < 0) {
        return -21;
    }
    for (int i = 0; i < n; i++) {
        r->banana[i] = next(r);
    }
    return 0;
}

static int read_cherry(struct reader *r, int n)
{
    if (n < 0) {
        return -22;
    }
    for (int i = 0; i < n; i++) {
        r->cherry[i] = next(r);
    }
    return 0;
}

static int read_damson(struct reader *r, int n)
{
    if (n < 0) {
        return -23;
    }
    for (int i = 0; i < n; i++) {
        r->damson[i] = next(r);
    }
    return 0;
}

static int read_elderberry(struct reader *r, int n)
{
    if (n < 0) {
        return -24;
    }
    for (int i = 0; i < n; i++) {
        r->elderberry[i] = next(r);
    }
    return 0;
}

static int read_fig(struct reader *r, int n)
{
    if (n < 0) {
        return -25;
    }
    for (int i = 0; i < n; i++) {
        r->fig[i] = next(r);
    }
    return 0;
}

static int read_grape(struct reader *r, int n)
{
    if (n < 0) {
        return -26;
    }
    for (int i = 0; i < n; i++) {
        r->grape[i] = next(r);
    }
    return 0;
}

static int read_hazelnut(struct reader *r, int n)
{
    if (n < 0) {
        return -27;
    }
    for (int i = 0; i < n; i++) {
        r->hazelnut[i] = next(r);
    }
    return 0;
}

static int read_iris(struct reader *r, int n)
{
    if (n < 0) {
        return -28;
    }
    for (int i = 0; i < n; i++) {
        r->iris[i] = next(r);
    }
    return 0;
}

static int read_jasmine(struct reader *r, int n)
{
    if (n < 0) {
        return -29;
    }
    for (int i = 0; i < n; i++) {
        r->jasmine[i] = next(r);
    }
    return 0;
}

static int read_kumquat(struct reader *r, int n)
{
    if (n < 0) {
        return -30;
    }
    for (int i = 0; i < n; i++) {
        r->kumquat[i] = next(r);
    }
    return 0;
}

static int read_lemon(struct reader *r, int n)
{
    if (n < 0) {
        return -31;
    }
    for (int i = 0; i < n; i++) {
        r->lemon[i] = next(r);
    }
    return 0;
}

static int read_mango(struct reader *r, int n)
{
    if (n < 0) {
        return -32;
    }
    for (int i = 0; i < n; i++) {
        r->mango[i] = next(r);
    }
    return 0;
}

static int read_nectarine(struct reader *r, int n)
{
    if (n < 0) {
        return -33;
    }
    for (int i = 0; i < n; i++) {
        r->nectarine[i] = next(r);
    }
    return 0;
}

static int read_orange(struct reader *r, int n)
{
    if (n < 0) {
        return -34;
    }
    for (int i = 0; i < n; i++) {
        r->orange[i] = next(r);
    }
    return 0;
}

static int read_peach(struct reader *r, int n)
{
    if (n < 0) {
        return -35;
    }
    for (int i = 0; i < n; i++) {
        r->peach[i] = next(r);
    }
    return 0;
}

static int read_quince(struct reader *r, int n)
{
    if (n < 0) {
        return -36;
    }
    for (int i = 0; i < n; i++) {
        r->quince[i] = next(r);
    }
    return 0;
}

static int read_raspberry(struct reader *r, int n)
{
    if (n < 0) {
        return -37;
    }
    for (int i = 0; i < n; i++) {
        r->raspberry[i] = next(r);
    }
    return 0;
}

static int read_strawberry(struct reader *r, int n)
{
    if (n < 0) {
        return -38;
    }
    for (int i = 0; i < n; i++) {
        r->strawberry[i] = next(r);
    }
    return 0;
}

static int read_tangerine(struct reader *r, int n)
{
    if (n < 0) {
        return -39;
    }
    for (int i = 0; i < n; i++) {
        r->tangerine[i] = next(r);
    }
    return 0;
}

